"""Real SDKs and agent frameworks, unmodified: a tool call that runs and a final answer, in every protocol."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import anthropic
import openai
import pytest

from support.serving import Server, serving, write_script

QUESTION, ANSWER = "What is 2 + 3?", "It is five."
SHELL_QUESTION = "What does the shell say?"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LINES: list[dict[str, Any]] = [
    {
        "when": QUESTION,
        "reasoning": "A sum: the tool knows.",
        "content": "Let me see.",
        "tool_calls": [{"name": "add", "arguments": '{"a": 2,  "b":3}'}],
    },
    {
        "when": SHELL_QUESTION,
        "content": "Let me compute.",
        "tool_calls": [{"name": "bash", "arguments": '{"command": "echo sum=$((2 + 3))"}'}],
    },
    {"when": "sum=5", "reasoning": "Five.", "content": ANSWER},
]
Session = Mapping[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    script = write_script(tmp_path_factory.mktemp("script") / "script.jsonl", *LINES)
    with serving("--engine", script, "--set", "model.thinking_retention=all") as server:
        yield server


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"sum={a + b}"


# --- the clients: each asks, runs the tool that is called, and returns the final text -----------------------------


def openai_chat(session: Session, stream: bool) -> str:
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
    with openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["api_key"], max_retries=0) as client:
        while True:
            if stream:
                with client.chat.completions.stream(model="m", messages=messages, tools=[tool]) as events:
                    message = events.get_final_completion().choices[0].message
            else:
                answer = client.chat.completions.create(model="m", messages=messages, tools=[tool])
                message = answer.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                assert call.type == "function"
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def respond(client: openai.OpenAI, stream: bool, **options: Any) -> tuple[Any, list[Any]]:
    """A response, and what the tools that it calls give back, as items."""
    if stream:
        with client.responses.stream(**options) as events:
            response: Any = events.get_final_response()
    else:
        response = client.responses.create(**options)
    calls = [item for item in response.output if item.type == "function_call"]
    results = [(call.call_id, add(**json.loads(call.arguments))) for call in calls]
    return response, [{"type": "function_call_output", "call_id": id, "output": result} for id, result in results]


def openai_responses(session: Session, stream: bool) -> str:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tool: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
    options: dict[str, Any] = {"model": "m", "tools": [tool], "instructions": "Be brief.", "store": False}
    options["include"] = ["reasoning.encrypted_content"]
    with openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["api_key"], max_retries=0) as client:
        while True:
            response, results = respond(client, stream, input=items, **options)
            if not results:
                return response.output_text
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            items += results


def openai_responses_by_id(session: Session, stream: bool) -> str:
    """Only what is new is sent; the rest is named by the id of the response before."""
    tool: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
    previous: str | None = None
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    with openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["api_key"], max_retries=0) as client:
        while True:
            options: dict[str, Any] = {"model": "m", "tools": [tool], "instructions": "Be brief."}
            options |= {"previous_response_id": previous} if previous else {}
            response, results = respond(client, stream, input=items, **options)
            if not results:
                return response.output_text
            previous, items = response.id, results


def anthropic_messages(session: Session, stream: bool) -> str:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tool: Any = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
    options: dict[str, Any] = {"model": "m", "max_tokens": 1000, "system": "Be brief.", "tools": [tool]}
    options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    with anthropic.Anthropic(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
        while True:
            counted = client.messages.count_tokens(
                model="m", messages=messages, system="Be brief.", tools=[tool]
            ).input_tokens
            if stream:
                with client.messages.stream(messages=messages, **options) as events:
                    message = events.get_final_message()
            else:
                message = client.messages.create(messages=messages, **options)
            assert message.usage.input_tokens == counted
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                assert message.stop_reason == "end_turn"
                return "".join(block.text for block in message.content if block.type == "text")
            assert message.stop_reason == "tool_use"
            messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": add(**call.input)}  # type: ignore[arg-type]
                for call in calls
            ]
            messages.append({"role": "user", "content": results})


def anthropic_runner(session: Session, stream: bool) -> str:
    """The SDK runs the tools itself, over its beta addresses."""
    options: dict[str, Any] = {
        "model": "m",
        "max_tokens": 1000,
        "system": "Be brief.",
        "tools": [anthropic.beta_tool(add)],
    }
    with anthropic.Anthropic(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
        asked: Any = [{"role": "user", "content": QUESTION}]
        runner: Any = client.beta.messages.tool_runner(messages=asked, stream=stream, **options)
        message: Any = None
        for message in runner:
            message = message.get_final_message() if stream else message
        return "".join(block.text for block in message.content if block.type == "text")


def openai_agents(kind: str) -> Callable[[Session, bool], str]:
    async def run(session: Session, stream: bool) -> str:
        from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool

        async with openai.AsyncOpenAI(
            base_url=session["base_url"] + "/v1", api_key=session["api_key"], max_retries=0
        ) as client:
            model_type = OpenAIChatCompletionsModel if kind == "chat" else OpenAIResponsesModel
            model = model_type(model="m", openai_client=client)
            agent = Agent(name="adder", instructions="Be brief.", model=model, tools=[function_tool(add)])
            config = RunConfig(tracing_disabled=True)
            if not stream:
                return str((await Runner.run(agent, QUESTION, run_config=config)).final_output)
            streamed = Runner.run_streamed(agent, QUESTION, run_config=config)
            async for _ in streamed.stream_events():
                pass
            return str(streamed.final_output)

    return _run(run)


def pydantic_ai(kind: str) -> Callable[[Session, bool], str]:
    async def run(session: Session, stream: bool) -> str:
        from pydantic_ai import Agent
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.anthropic import AnthropicProvider
        from pydantic_ai.providers.openai import OpenAIProvider

        url, key = session["base_url"], session["api_key"]
        if kind == "messages":
            client: Any = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
            model: Any = AnthropicModel("claude-m", provider=AnthropicProvider(anthropic_client=client))
        else:
            client = openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0)
            provider = OpenAIProvider(openai_client=client)
            model = (OpenAIChatModel if kind == "chat" else OpenAIResponsesModel)("m", provider=provider)
        agent = Agent(model, instructions="Be brief.", tools=[add])
        async with client:
            if not stream:
                return (await agent.run(QUESTION)).output

            async def watch(_: Any, events: Any) -> None:
                async for _ in events:
                    pass

            return (await agent.run(QUESTION, event_stream_handler=watch)).output

    return _run(run)


def langgraph(kind: str) -> Callable[[Session, bool], str]:
    def run(session: Session, stream: bool) -> str:
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.prebuilt import ToolNode, tools_condition

        url, key = session["base_url"] + "/v1", session["api_key"]
        model = ChatOpenAI(
            model="m", base_url=url, api_key=key, streaming=stream, use_responses_api=kind == "responses", max_retries=0
        )
        bound = model.bind_tools([tool(add)])
        graph = StateGraph(MessagesState)

        def ask(state: MessagesState) -> Any:
            return {"messages": [bound.invoke(state["messages"])]}

        graph.add_node("model", ask)
        graph.add_node("tools", ToolNode([tool(add)]))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        asked: Any = {"messages": [{"role": "user", "content": QUESTION}]}
        return str(graph.compile().invoke(asked)["messages"][-1].text)

    return run


def _run(work: Callable[[Session, bool], Any]) -> Callable[[Session, bool], str]:
    import asyncio

    return lambda session, stream: asyncio.run(work(session, stream))


CLIENTS: dict[str, Callable[[Session, bool], str]] = {
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "openai-responses-by-id": openai_responses_by_id,
    "anthropic": anthropic_messages,
    "anthropic-runner": anthropic_runner,
    "openai-agents-chat": openai_agents("chat"),
    "openai-agents-responses": openai_agents("responses"),
    "pydantic-ai-chat": pydantic_ai("chat"),
    "pydantic-ai-responses": pydantic_ai("responses"),
    "pydantic-ai-messages": pydantic_ai("messages"),
    "langgraph-chat": langgraph("chat"),
    "langgraph-responses": langgraph("responses"),
}
# What these change of a reply that they send back.
CHANGED = {
    "anthropic": ["arguments_respelled"],
    "anthropic-runner": ["arguments_respelled"],
    "openai-agents-chat": ["reasoning_dropped"],
    "pydantic-ai-chat": ["arguments_respelled"],
    "pydantic-ai-responses": ["arguments_respelled", "reasoning_in_content"],
    "pydantic-ai-messages": ["arguments_respelled"],
    "langgraph-chat": ["arguments_respelled", "reasoning_dropped"],
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_tool_call_and_a_final_answer(server: Server, client: str, stream: bool) -> None:
    session = server.open()
    assert CLIENTS[client](session, stream) == ANSWER
    tree = server.call("GET", f"/sessions/{session['id']}/tree")
    assert [turn["state"] for turn in tree["turns"]] == ["delivered"] * 2
    ledger = server.call("GET", f"/sessions/{session['id']}/ledger")
    assert ledger["sampled"] == ledger["in_flight"] > 0
    assert [turn["accepted"] for turn in tree["turns"]] == [[], CHANGED.get(client, [])]
    assert server.call("GET", f"/sessions/{session['id']}/drift") == []
    assert [node["kind"] for node in tree["nodes"]] == ["context", "output", "context", "output"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_known_by_its_type_is_called_like_any_other(server: Server, stream: bool) -> None:
    session = server.open()
    asked: list[Any] = [{"role": "user", "content": SHELL_QUESTION}]
    options: Any = {"model": "m", "max_tokens": 1000, "tools": [{"type": "bash_20250124", "name": "bash"}]}
    with anthropic.Anthropic(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:

        def ask() -> Any:
            if not stream:
                return client.messages.create(messages=asked, **options)
            with client.messages.stream(messages=asked, **options) as events:
                return events.get_final_message()

        message = ask()
        without = client.messages.count_tokens(model="m", messages=asked).input_tokens
        assert message.usage.input_tokens > without + 20  # the model was told of it
        (call,) = [block for block in message.content if block.type == "tool_use"]
        ran = subprocess.run(["bash", "-c", call.input["command"]], capture_output=True, text=True, timeout=20)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": ran.stdout}
        asked += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        assert ask().content[-1].text == ANSWER
    assert server.call("GET", f"/sessions/{session['id']}/drift") == []
    tree = server.call("GET", f"/sessions/{session['id']}/tree")
    assert [node["kind"] for node in tree["nodes"]] == ["context", "output", "context", "output"]

"""An agent that knows the `openai` package and a base URL, and owns a calculator. It has never heard of Stenograph."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import re
import sys
from typing import Any

import openai

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Exact result",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def calculate(arguments: str) -> str:
    """What the model asked for, or what was wrong with it: a model that errs goes on and learns."""
    try:
        expression = json.loads(arguments)["expression"]
        a, sign, b = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression).groups()  # type: ignore[union-attr]
        return str(SIGNS[sign](int(a), int(b)))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "error: write a op b"


def example(question: str, expression: str, result: str) -> list[Any]:
    """One solved question, as if it had happened earlier in the conversation."""
    call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call", "content": result},
        {"role": "assistant", "content": result},
    ]


async def solve(question: str, client: openai.AsyncOpenAI, model: str) -> str:
    messages = example("512 - 387 = ?", "512 - 387", "125") + example("206 * 734 = ?", "206 * 734", "151204")
    messages.append({"role": "user", "content": question})
    content = ""
    for _ in range(2):
        answer = await client.chat.completions.create(model=model, messages=messages, tools=[CALCULATOR], max_tokens=48)
        message = answer.choices[0].message
        content = message.content or ""
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            if call.type == "function":
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return content.strip()


async def attempt(task: Any, session: Any) -> str:
    """The same agent as a coroutine, for runs that would rather not start a process per attempt."""
    async with openai.AsyncOpenAI(base_url=session.base_url + "/v1", api_key=session.api_key) as client:
        return await solve(task.prompt, client, session.model)


async def main() -> None:
    async with openai.AsyncOpenAI() as client:
        answer = await solve(sys.argv[1], client, os.environ["OPENAI_MODEL"])
        print(" ".join(answer.split()) or "(nothing)")  # on one line: the last one printed is the answer


if __name__ == "__main__":
    asyncio.run(main())

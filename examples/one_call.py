"""The smallest agent: one question, one answer."""

from typing import Any

import openai


async def attempt(task: Any, session: Any) -> str:
    async with openai.AsyncOpenAI(base_url=session.base_url + "/v1", api_key=session.api_key) as client:
        messages: Any = [{"role": "user", "content": f"{task.prompt}\nAnswer with the number alone."}]
        answer = await client.chat.completions.create(model=session.model, messages=messages)
    return (answer.choices[0].message.content or "").strip().rstrip(".")

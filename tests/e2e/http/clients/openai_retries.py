"""Run by the clients' interpreter against a server with a queue of one: `max_retries`, an argument, waits for it.

Prints how many of 12 requests at once were answered.
"""

import asyncio
import sys

import openai


async def answered(max_retries):
    async with openai.AsyncOpenAI(base_url=sys.argv[1], api_key="EMPTY", max_retries=max_retries) as client:
        calls = (
            client.completions.create(
                model="ferrule-tiny", prompt="1, 2,", max_tokens=32, extra_body={"min_tokens": 32}
            )
            for _ in range(12)
        )
        found = await asyncio.gather(*calls, return_exceptions=True)
    odd = [one for one in found if isinstance(one, Exception) and not isinstance(one, openai.RateLimitError)]
    if odd:
        raise odd[0]
    return sum(not isinstance(one, Exception) for one in found)


print(asyncio.run(answered(int(sys.argv[2]))))

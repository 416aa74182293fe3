"""OpenAI's Agents SDK over Responses: a function is called, its result goes back, the answer comes. Arguments: URL."""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

asked: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather in a city.

    Args:
        city: The city.
    """
    asked.append(city)
    return '{"temperature": 21}'


async def main(url: str) -> None:
    set_tracing_disabled(True)
    model = OpenAIResponsesModel("ferrule-tiny", AsyncOpenAI(base_url=url, api_key="EMPTY"))
    settings = ModelSettings(temperature=0, max_tokens=200, tool_choice="required")
    agent = Agent("weather", tools=[get_weather], model=model, model_settings=settings)
    question = "What is the weather in Lisbon?"
    whole = await Runner.run(agent, question)
    kinds = [item.type for item in whole.new_items]
    print("whole", kinds[:2], kinds[-1], len(asked))
    streamed = Runner.run_streamed(agent, question)
    events = [event.type async for event in streamed.stream_events()]
    print("streamed", "raw_response_event" in events, str(streamed.final_output) == str(whole.final_output), len(asked))


asyncio.run(main(sys.argv[1]))

"""Run by the clients' interpreter: what goes wrong arrives as the client's own exceptions."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="EMPTY", max_retries=0)
messages = [{"role": "user", "content": "Hello!"}]


def status_of(call, error):
    """Return the status that comes with `error`, whose message must be Ferrule's."""
    try:
        call()
    except error as found:
        if type(found) is error and found.body["message"]:
            return found.status_code
        raise
    raise SystemExit(f"no {error.__name__}")


def ask(**more):
    return client.chat.completions.create(**{"model": "ferrule-tiny", "messages": messages, **more})


stranger = openai.OpenAI(base_url=sys.argv[1], api_key="wrong", max_retries=0)
print(
    status_of(lambda: ask(model="other"), openai.NotFoundError),
    status_of(lambda: ask(temperature=-1), openai.BadRequestError),
    status_of(lambda: ask(messages=[]), openai.BadRequestError),
    status_of(lambda: ask(max_tokens=100_000), openai.BadRequestError),
    status_of(lambda: client.embeddings.create(model="ferrule-tiny", input="x"), openai.NotFoundError),
    status_of(lambda: client.models.retrieve("other"), openai.NotFoundError),
    status_of(stranger.models.list, openai.AuthenticationError),
)
with client.chat.completions.with_streaming_response.create(model="ferrule-tiny", messages=messages) as response:
    print(response.status_code, response.headers["content-type"])
raw = client.completions.with_raw_response.create(model="ferrule-tiny", prompt=["1, 2,", "3, 4,"], n=2, max_tokens=2)
print([choice.index for choice in raw.parse().choices])

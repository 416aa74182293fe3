"""Run by the clients' interpreter while the server still starts: refused connections and 503 are waited for."""

import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="EMPTY", max_retries=60)
messages = [{"role": "user", "content": "What is the capital of France?"}]
answer = client.chat.completions.create(model="ferrule-tiny", messages=messages, temperature=0)
print(answer.choices[0].message.content)

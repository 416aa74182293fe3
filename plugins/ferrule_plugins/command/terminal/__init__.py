"""The parts that `chat` and `complete` share: a client of OpenAI-compatible servers, and the terminal's input and
output.
"""

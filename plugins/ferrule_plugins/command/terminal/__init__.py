"""What `chat` and `complete` share: a client of OpenAI-compatible servers, and the terminal's two sides."""

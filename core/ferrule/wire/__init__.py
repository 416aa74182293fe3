"""The communication between the engine and its clients: messages, the sockets or queues for them, and lifelines."""

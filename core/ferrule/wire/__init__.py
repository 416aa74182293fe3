"""The communication between processes: the board, the messages between engine and clients, and the socket for them."""

"""What processes share: the board, the messages between engine and clients, and the socket that carries them."""

"""Put an engine together: what every executor loads, and the socket that clients talk to."""

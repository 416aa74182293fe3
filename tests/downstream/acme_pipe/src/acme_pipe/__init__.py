"""The worker of Ferrule in a child process."""

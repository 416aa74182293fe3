"""Work over client data in child processes that can be killed."""

"""The numbers that the processes of one server share, in memory that all of them map."""

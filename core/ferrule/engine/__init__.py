"""The engine: requests, blocks, the scheduler and its loop. No torch, clock, socket or environment."""

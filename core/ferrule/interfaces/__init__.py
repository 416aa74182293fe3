"""The plugin contract, version 1: one module per kind, each with its abstract base class and value types.

This package is what a plugin's author imports. It holds no logic, imports no torch, and changes only with a new
contract version (`tests/contracts/` keeps a snapshot).
"""

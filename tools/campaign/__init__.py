"""Campaigns: drivers that start real servers, do bad things to them, and say what they came to.

Each module is one subject, ``python -m tools.campaign.<subject>``. A run may take minutes, so `make test` has only a
few cases of each.
"""

"""Reward functions of users, run in processes that can be killed.

Nothing is imported here: the child process starts with the standard library alone.
"""

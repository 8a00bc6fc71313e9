"""Servers of several processes: replicas of one model, a process per model, and Ray."""

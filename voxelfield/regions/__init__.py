"""Captures that are divided into regions, each of which has a field of its own, and their rendering as one."""

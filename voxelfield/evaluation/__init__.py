"""Comparison of renderings with photographs: metrics, and the evaluation of views."""

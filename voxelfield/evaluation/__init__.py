"""Comparison of renderings with photographs: metrics, views and the report."""

"""Presets: functions that return a whole configuration, named after the papers' experiments."""

"""Presets: functions that return a complete configuration, named after the experiments of the papers."""

"""Language models as a task of the training loop: configuration, modules, calibration, validation, report, export."""

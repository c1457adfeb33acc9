"""Loggers of a run: files in the run folder, TensorBoard, Weights & Biases, MLPerf, and the console interface.

`base` has the records and the interfaces, `files` opens all loggers of a config and reads the tables back.
"""

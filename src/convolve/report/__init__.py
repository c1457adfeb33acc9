"""HTML report and plots of a run: curves, calibration, confusion matrix, most confident mistakes, number formats.

Everything is computed from records and predictions that are passed in; `runs/report.py` collects them.
"""

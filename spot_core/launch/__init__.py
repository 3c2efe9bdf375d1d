"""What happens around a run's processes: exit codes, the stop record, and keeping workers tied to their launcher.

Torch-free; the part that drives torch's elastic agent is `spot_core.pytorch.launch`.
"""

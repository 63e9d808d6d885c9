"""Monitors the machine while trials run: devices, host, logs. A null object stands for missing hardware, which is never an error."""

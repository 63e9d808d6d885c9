"""Monitors the machine while trials run: devices, host, logs. Missing hardware is not an error: a null object stands for it."""

"""Monitors the machine while trials run: devices, host, logs. For absent hardware there is a null object, never an error."""

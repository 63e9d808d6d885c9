"""Monitors the machine while trials run: devices, host, logs. Absent hardware is a null object, never an error."""

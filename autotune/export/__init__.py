"""Exports the winner of a study as a file for other tools: `formats` lists the formats, and `render` writes one."""

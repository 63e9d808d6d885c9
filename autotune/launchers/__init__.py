"""Starting a trial's processes, watching them, and ending every one of them."""

"""Reports a study's results: the text of its verdict, and an HTML file that shows everything."""

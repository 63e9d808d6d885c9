"""What a study found, for people: the words of its verdict, and one HTML file that shows everything."""

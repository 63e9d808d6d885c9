"""The command line: what a person types and sees. Each command imports what it needs when it runs, so that help is quick."""

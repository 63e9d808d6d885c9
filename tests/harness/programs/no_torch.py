"""Never imports torch."""

print("fine")

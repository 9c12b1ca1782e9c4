"""What use teaches: experience, and the refit that takes it in."""

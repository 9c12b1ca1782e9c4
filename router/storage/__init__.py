"""What is kept of requests and answers, where the user asks for it."""

"""Learning from judged answers: collected beside the requests, never in their way."""

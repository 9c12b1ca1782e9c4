"""What judged answers teach: collected beside the requests, never in their way."""

"""What both tiers' answers were worth: graded rows, recorded outcomes, agreement of answers."""

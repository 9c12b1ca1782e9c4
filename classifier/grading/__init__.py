"""Grading of both tiers' answers: graded files, agreement of answers, a judge."""

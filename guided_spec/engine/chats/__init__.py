"""Conversations: what a chat template reads of them, and the messages as it gets them."""

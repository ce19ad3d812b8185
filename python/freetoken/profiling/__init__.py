"""Where the time of a step goes: ranges named by role, traces of them, and the accounting (docs/profile.md)."""

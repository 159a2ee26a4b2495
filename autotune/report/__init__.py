"""Profiles and plans as a person reads them: their texts, and one page with figures."""

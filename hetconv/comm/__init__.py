"""Communication between ranks: process groups, messages, consensus and redistribution."""

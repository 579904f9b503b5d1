"""What starts cost: cold, second, restored and near, and with other settings, side by side.

`variants` says what is started, `starts` starts it in places of its own, `tool` asks vLLM's own benchmark,
`chart` draws what it took.
"""

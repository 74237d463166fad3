"""What a program may use up is bounded, and the result says which bound it met."""

import belljar

programs = {
    "an endless loop": ("while True: pass", {"timeout": "1s"}),
    "a huge list": ("x = [0] * 10**9", {"memory": "128M"}),
    "an endless line": ("print('x' * 10_000_000)", {"output": "64K"}),
    "a mistake": ("1 / 0", {}),
}

for name, (code, policy) in programs.items():
    result = belljar.run(code, policy=policy)
    told = result.error.type if result.error else "no exception"
    print(f"{name}: {result.status}, {told}, truncated={result.truncated}")

# Every result carries what held each limit on this host.
for field, held in belljar.run("1").enforcement.items():
    print(f"{field}: {held.state} by {held.by}")

import collections, datetime, json, re

text = "2024-01-02 ok 2024-03-04 bad"
days = [datetime.date.fromisoformat(each) for each in re.findall(r"\d{4}-\d\d-\d\d", text)]
print(json.dumps({"days": [str(day) for day in days], "gap": (days[1] - days[0]).days}))
print(collections.Counter("banana").most_common(2))

import sys

from service import Service

service = Service()
for line in sys.stdin:
    print(service.answer(line.split()))

#!/bin/bash
echo begun >> /app/attempts-harbor
sleep 1
python3 -c "print(sum(map(int, open('/app/numbers.txt'))))" > /app/sum.txt

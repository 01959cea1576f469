# An application of this repository: docker build -f deploy/apps.Dockerfile --build-arg APP=prices -t rowmill-prices .
# APP is analysis, enrichment, ocr, prices or registre. docker-compose.yml builds and runs all of them.
FROM python:3.12-slim AS build
WORKDIR /srv/rowmill
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN python -m venv /srv/venv \
    && /srv/venv/bin/pip install --no-cache-dir --upgrade 'pip>=25.1' \
    && /srv/venv/bin/pip install --no-cache-dir '.[prometheus,sentry]' --group apps

FROM python:3.12-slim
ARG APP
# A browser for registre; libraries that the local recogniser of ocr loads.
RUN apt-get update \
    && case "$APP" in \
         registre) apt-get install --yes --no-install-recommends chromium fonts-dejavu-core ;; \
         ocr) apt-get install --yes --no-install-recommends libgl1 libglib2.0-0 ;; \
         analysis | enrichment | prices) ;; \
         *) echo "APP=$APP is none of analysis, enrichment, ocr, prices, registre" >&2; exit 1 ;; \
       esac \
    && rm -rf /var/lib/apt/lists/*
# What is written goes here; a new volume takes over the owner.
RUN useradd --system --uid 10001 --home-dir /srv/rowmill rowmill \
    && install --directory --owner 10001 /var/cache/prices /var/lib/documents /var/lib/evidence
COPY --from=build /srv/venv /srv/venv
WORKDIR /srv/rowmill
COPY apps ./apps
USER 10001
ENV PATH=/srv/venv/bin:$PATH PYTHONUNBUFFERED=1 ROWMILL_APP=apps.$APP:mill
EXPOSE 9100
ENTRYPOINT ["rowmill"]
CMD ["run", "--grace", "30", "--log", "json", "--metrics-port", "9100", "--metrics-host", "0.0.0.0"]

{{- define "kvboost.name" -}}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{- end }}

{{- /* Labels of one track, stable or canary: (list $ track) */ -}}
{{- define "kvboost.labels" -}}
app.kubernetes.io/name: kvboost-rag
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
kvboost.io/track: {{ index . 1 }}
{{- end }}

{{- define "kvboost.check" -}}
{{- $s := .Values.server }}
{{- if le (int .Values.terminationGraceSeconds) (int (addf $s.drainSeconds .Values.preStopSeconds)) }}
{{- fail "terminationGraceSeconds must be longer than preStopSeconds + server.drainSeconds: streams would be cut" }}
{{- end }}
{{- if and (not .Values.auth.existingSecret) (not .Values.auth.allowNoKey) }}
{{- fail "give auth.existingSecret (a Secret with keys.json), or say auth.allowNoKey=true" }}
{{- end }}
{{- $alone := and (le (int .Values.warm.shards) 1) (not .Values.statefulSet) }}
{{- if and .Values.warm.enabled (not $alone) (not .Values.stores.shared) (not .Values.stores.existingSecret) }}
{{- fail "warm: pods of its own cannot fill volumes of others; give stores.shared, where they leave what they encode" }}
{{- end }}
{{- $shared := or (eq .Values.persistence.kind "hostPath") (eq .Values.persistence.accessMode "ReadWriteMany") (eq .Values.persistence.kind "emptyDir") }}
{{- if and (not .Values.statefulSet) (not $shared) (or .Values.autoscaling.enabled (gt (int .Values.replicas) 1)) }}
{{- fail "several replicas of a Deployment cannot share a ReadWriteOnce volume: statefulSet=true, or accessMode ReadWriteMany" }}
{{- end }}
{{- end }}

{{- /* The pod of a track: (list $ track server image-tag) */ -}}
{{- define "kvboost.pod" -}}
{{- $root := index . 0 }}{{ $track := index . 1 }}{{ $s := index . 2 }}{{ $v := $root.Values }}
metadata:
  labels: {{- include "kvboost.labels" (list $root $track) | nindent 4 }}
  annotations:
    checksum/config: {{ omit $s "switch" | toJson | sha256sum }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $v.terminationGraceSeconds }}
  securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, fsGroupChangePolicy: OnRootMismatch, seccompProfile: {type: RuntimeDefault}}
  {{- with $v.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: server
      image: "{{ $v.image.repository }}:{{ index . 3 | default $v.image.tag | default $root.Chart.AppVersion }}"
      imagePullPolicy: {{ $v.image.pullPolicy }}
      args:
        - serve
        - --host=0.0.0.0
        - --port=8000
        - --store=/data/store
        - --model={{ $s.model }}
        {{- with $s.modelName }}
        - --model-name={{ . }}
        {{- end }}
        {{- range $adapter, $folder := $s.adapters }}
        - --adapter={{ $adapter }}={{ $folder }}
        {{- end }}
        - {{ ternary "--enabled" "--no-enabled" $s.enabled }}
        - --max-requests={{ int $s.maxRequests }}
        - --deadline={{ $s.deadlineSeconds }}
        - --drain={{ $s.drainSeconds }}
        - --answer-tokens={{ int $s.answerTokens }}
        - --max-body={{ $s.maxBody }}
        - --chunk-tokens={{ int $s.chunkTokens }}
        - {{ ternary "--open-metrics" "--no-open-metrics" $s.openMetrics }}
        - --switch-file=/etc/kvboost/switch
        {{- with $s.dtype }}
        - --dtype={{ . }}
        {{- end }}
        {{- with $s.device }}
        - --device={{ . }}
        {{- end }}
        {{- with $s.memoryBudget }}
        - --memory-budget={{ . }}
        {{- end }}
        {{- with $s.diskBudget | default (include "kvboost.diskBudget" $root) }}
        - --disk-budget={{ . }}
        {{- end }}
        {{- if $v.auth.existingSecret }}
        - --keys-file=/etc/kvboost-keys/keys.json
        {{- else }}
        - --allow-no-key
        {{- end }}
      {{- with include "kvboost.environment" $root | trim }}
      {{- . | nindent 6 }}
      {{- end }}
      ports: [{name: http, containerPort: 8000}]
      securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
      # Loading and probing a model takes minutes.
      startupProbe: {httpGet: {path: /ready, port: http}, periodSeconds: 10, failureThreshold: 60}
      readinessProbe: {httpGet: {path: /ready, port: http}, periodSeconds: 5, timeoutSeconds: 6}
      livenessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 20, timeoutSeconds: 10}
      # Until the routes have forgotten this pod; SIGTERM comes afterwards.
      lifecycle: {preStop: {exec: {command: [sleep, "{{ $v.preStopSeconds }}"]}}}
      resources: {{- toYaml $v.resources | nindent 8 }}
      volumeMounts:
        - {name: data, mountPath: /data}
        - {name: tmp, mountPath: /tmp}
        - {name: config, mountPath: /etc/kvboost, readOnly: true}
        {{- if $v.auth.existingSecret }}
        - {name: keys, mountPath: /etc/kvboost-keys, readOnly: true}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: config, configMap: {name: {{ include "kvboost.name" $root }}-{{ $track }}}}
    {{- if $v.auth.existingSecret }}
    - {name: keys, secret: {secretName: {{ $v.auth.existingSecret }}, defaultMode: 288}}
    {{- end }}
    {{- with include "kvboost.volume" (list $root $track) | trim }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}

{{- /* Variables of the server's container and of the warm Job's. */ -}}
{{- define "kvboost.environment" -}}
{{- $shared := .Values.stores }}
{{- $env := dict }}
{{- range $name, $value := dict "KVBOOST_SHARED_STORE" $shared.shared "AWS_ENDPOINT_URL" $shared.endpoint "AWS_REGION" $shared.region }}
{{- if $value }}{{ $_ := set $env $name $value }}{{ end }}
{{- end }}
{{- with merge (deepCopy .Values.env) $env }}
env:
  {{- range $name, $value := . }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
  {{- end }}
{{- end }}
{{- with $shared.existingSecret }}
envFrom: [{secretRef: {name: {{ . }}}}]
{{- end }}
{{- end }}

{{- define "kvboost.diskBudget" -}}
{{- $v := .Values }}
{{- if eq $v.persistence.kind "pvc" }}
{{- $number := regexFind "^[0-9]+" $v.persistence.size | float64 }}
{{- printf "%.2f%sB" (mulf $number $v.kvCacheSizeRatio) (regexFind "[KMGT]i$" $v.persistence.size) }}
{{- end }}
{{- end }}

{{- define "kvboost.volume" -}}
{{- $root := index . 0 }}{{ $track := index . 1 }}{{ $p := $root.Values.persistence }}
{{- if eq $p.kind "emptyDir" }}
- {name: data, emptyDir: {}}
{{- else if eq $p.kind "hostPath" }}
- {name: data, hostPath: {path: {{ required "persistence.hostPath" $p.hostPath }}, type: DirectoryOrCreate}}
{{- else if eq $p.kind "existingClaim" }}
- {name: data, persistentVolumeClaim: {claimName: {{ required "persistence.existingClaim" $p.existingClaim }}}}
{{- else if not $root.Values.statefulSet }}
- {name: data, persistentVolumeClaim: {claimName: {{ include "kvboost.name" $root }}-{{ $track }}}}
{{- end }}
{{- end }}
